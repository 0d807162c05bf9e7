package querier

import (
	"context"
	"net/url"

	"github.com/prometheus/prometheus/config"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/rules"
	"github.com/prometheus/prometheus/scrape"
	"github.com/prometheus/prometheus/tsdb"

	"github.com/varvedb/varve/pkg/series"
)

// nothing stands for the parts of a Prometheus server that Varve does not have: it
// scrapes nothing, evaluates no rules yet and alerts nobody. The API answers valid
// empty documents from it.
type nothing struct{}

func (nothing) ScrapePools() []string { return []string{} }

func (nothing) TargetsActive() map[string][]*scrape.Target { return map[string][]*scrape.Target{} }

func (nothing) TargetsDropped() map[string][]*scrape.Target { return map[string][]*scrape.Target{} }

func (nothing) TargetsDroppedCounts() map[string]int { return map[string]int{} }

func (nothing) ScrapePoolConfig(pool string) (*config.ScrapeConfig, error) {
	return nil, series.Errorf(series.Invalid, "there is no scrape pool %q: Varve scrapes nothing", pool)
}

func (nothing) Alertmanagers() []*url.URL { return []*url.URL{} }

func (nothing) DroppedAlertmanagers() []*url.URL { return []*url.URL{} }

func (nothing) RuleGroups() []*rules.Group { return []*rules.Group{} }

func (nothing) AlertingRules() []*rules.AlertingRule { return []*rules.AlertingRule{} }

// admin stands for the local TSDB of the admin endpoints, which are off.
type admin struct{}

func errNoAdmin() error {
	return series.Errorf(series.Invalid, "Varve has no local TSDB to administer by this API")
}

func (admin) CleanTombstones() error { return errNoAdmin() }

func (admin) Delete(context.Context, int64, int64, ...*labels.Matcher) error { return errNoAdmin() }

func (admin) Snapshot(string, bool) error { return errNoAdmin() }

func (admin) Stats(string, int) (*tsdb.Stats, error) { return nil, errNoAdmin() }

func (admin) WALReplayStatus() (tsdb.WALReplayStatus, error) { return tsdb.WALReplayStatus{}, nil }

func (admin) BlockMetas() ([]tsdb.BlockMeta, error) { return []tsdb.BlockMeta{}, nil }
