package fleet

// instance is one MIG instance of a GPU.
type instance struct {
	profile string
	id      int
	pod     []pair
}

// migProfiles are the ways in which a GPU is cut. Instance ids count from the
// first, so that the same id means another profile after a reconfiguration.
var migProfiles = [...]struct {
	profile string
	n, from int
}{
	{"1g.10gb", 7, 1}, {"2g.20gb", 3, 1}, {"3g.40gb", 2, 1}, {"7g.80gb", 1, 0},
}

// migLayout returns how GPU gpu of n is cut at t: it is cut anew twice a day.
func (f *Fleet) migLayout(n *Node, gpu int, t int64) ([]instance, span) {
	const cell = 12 * hour
	k := n.key.with(80).with(uint64(gpu))
	offset := int64(k.with(1).unit() * float64(cell))
	c := floorDiv(t-epoch-offset, cell)
	from := epoch + offset + c*cell
	d := k.with(2).with(uint64(c))
	p := migProfiles[d.pick(len(migProfiles))]
	var all []instance
	for i := range p.n {
		in := instance{profile: p.profile, id: p.from + i}
		if pk := d.with(uint64(10 + i)); pk.unit() < 0.8 {
			model := vllmModels[pk.with(1).pick(len(vllmModels))]
			in.pod = []pair{
				{"container", "vllm"}, {"namespace", "inference"},
				{"pod", "mig-" + model.short + "-" + podSuffix(pk.with(2), 5)},
			}
		}
		all = append(all, in)
	}
	return all, span{from, from + cell}
}
