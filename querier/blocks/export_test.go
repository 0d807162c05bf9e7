package blocks

import "context"

// RefreshAll does what the store does every RefreshInterval.
func RefreshAll(s *Store) { s.lister.refreshAll(context.Background()) }

// Tenants counts the tenants that the store keeps lists of.
func Tenants(s *Store) int {
	s.lister.mu.Lock()
	defer s.lister.mu.Unlock()
	return len(s.lister.tenants)
}
