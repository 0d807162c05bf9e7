package main

import (
	"fmt"
	"io"
	"time"
)

type failuresCommand struct {
	fleetFlags `embed:""`
	From       string `default:"-14d" help:"Begin of the range: RFC 3339, now, or a duration before now."`
	To         string `default:"now" help:"End of the range."`
}

// Run prints one line per failure.
func (c *failuresCommand) Run(stdout io.Writer) error {
	now := time.Now()
	f, err := c.build(now)
	if err != nil {
		return err
	}
	from, err := parseTime(c.From, now)
	if err != nil {
		return fmt.Errorf("--from: %w", err)
	}
	to, err := parseTime(c.To, now)
	if err != nil {
		return fmt.Errorf("--to: %w", err)
	}
	for _, x := range f.Failures(from.UnixMilli(), to.UnixMilli()) {
		fmt.Fprintf(stdout, "%s %s %s gpu=%d kind=%s xid=%d\n",
			time.UnixMilli(x.At).UTC().Format(time.RFC3339), time.UnixMilli(x.Until).UTC().Format(time.RFC3339), x.Node, x.GPU, x.Kind, x.XID)
	}
	return nil
}
