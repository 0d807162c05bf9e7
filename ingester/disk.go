package ingester

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// freeDisk returns the bytes that an unprivileged process may still write to the
// file system of dir.
func freeDisk(dir string) (int64, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return 0, fmt.Errorf("statfs %s: %w", dir, err)
	}
	return int64(st.Bavail) * st.Bsize, nil
}
