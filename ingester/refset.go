package ingester

// refSet is a set of series references that empties at no cost. A request adds each
// of its series, so it must cost nanoseconds: open addressing, and a generation
// number in each slot instead of clearing.
type refSet struct {
	slots      []refSlot
	mask       uint64
	generation uint32
}

type refSlot struct {
	ref        uint64
	generation uint32
}

// reset empties the set and makes room for n references.
func (s *refSet) reset(n int) {
	size := 64
	for size < 2*n {
		size *= 2
	}
	s.generation++
	if size > len(s.slots) || s.generation == 0 {
		s.slots = make([]refSlot, max(size, len(s.slots)))
		s.mask = uint64(len(s.slots) - 1)
		s.generation = 1
	}
}

// slot returns the slot of ref, or the free one where it belongs. TSDB numbers
// series one after the other, so the low bits spread them well.
func (s *refSet) slot(ref uint64) *refSlot {
	for i := ref & s.mask; ; i = (i + 1) & s.mask {
		slot := &s.slots[i]
		if slot.generation != s.generation || slot.ref == ref {
			return slot
		}
	}
}

func (s *refSet) has(ref uint64) bool { return s.slot(ref).generation == s.generation }

// add inserts ref. The caller adds no more than it announced to reset.
func (s *refSet) add(ref uint64) { *s.slot(ref) = refSlot{ref, s.generation} }
