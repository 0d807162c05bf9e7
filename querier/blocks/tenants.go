package blocks

import (
	"context"
	"time"
)

// tenant returns what is kept of the tenant, new if that is nothing.
func (l *lister) tenant(name string) *tenantList {
	l.mu.Lock()
	defer l.mu.Unlock()
	t := l.tenants[name]
	if t == nil {
		if len(l.tenants) >= l.cfg.MaxTenants {
			l.makeRoom()
		}
		t = &tenantList{name: name, turn: make(chan struct{}, 1)}
		l.tenants[name] = t
	}
	t.lastUse.Store(l.now().UnixMilli())
	return t
}

// makeRoom forgets all tenants without blocks, or, where there are none, the one that
// was not asked for the longest. Who uses them is not harmed. The caller holds mu.
func (l *lister) makeRoom() {
	var oldest *tenantList
	before := len(l.tenants)
	for name, t := range l.tenants {
		switch {
		case t.empty():
			delete(l.tenants, name)
		case oldest == nil || t.lastUse.Load() < oldest.lastUse.Load():
			oldest = t
		}
	}
	if len(l.tenants) == before && oldest != nil {
		delete(l.tenants, oldest.name)
	}
}

// due forgets the tenants that are out of use and returns those whose lists are to be
// kept up to date: those of tenants that have blocks. An empty list is read when it is
// asked for, so that names that somebody made up cost nothing further.
func (l *lister) due() []*tenantList {
	l.mu.Lock()
	defer l.mu.Unlock()
	var due []*tenantList
	for name, t := range l.tenants {
		empty, idle := t.empty(), l.cfg.TenantIdle
		if empty {
			idle = min(idle, l.cfg.MaxListAge)
		}
		switch {
		case l.now().Sub(time.UnixMilli(t.lastUse.Load())) > idle:
			delete(l.tenants, name)
		case !empty:
			due = append(due, t)
		}
	}
	return due
}

// refreshAll brings the lists that are in use up to date, and forgets the others.
func (l *lister) refreshAll(ctx context.Context) {
	for _, t := range l.due() {
		if ctx.Err() != nil {
			return
		}
		if err := l.refresh(ctx, t, true); err != nil && ctx.Err() == nil {
			l.log.Warn("list of blocks cannot be read anew", "tenant", t.name, "err", err)
		}
	}
}
