package series

import "github.com/oklog/ulid/v2"

// BlockSet is a set of block identities. Stores exchange it so that a block that
// one of them answers for is not read again by another.
type BlockSet map[ulid.ULID]struct{}

// Has tells whether id is in the set; the nil set is empty.
func (s BlockSet) Has(id ulid.ULID) bool {
	_, ok := s[id]
	return ok
}
