package fleet

import "math"

// key is a point in a tree of random streams. Everything random in the fleet is
// drawn from the key of its entity and moment, never from a running generator:
// that is what makes any instant reproducible without simulating the ones before.
type key uint64

// with derives the key of a part, an event or a moment of k.
func (k key) with(n uint64) key {
	x := uint64(k) + (n+1)*0x9e3779b97f4a7c15
	x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9
	x = (x ^ (x >> 27)) * 0x94d049bb133111eb
	return key(x ^ (x >> 31))
}

// unit returns a number in [0, 1).
func (k key) unit() float64 { return float64(k>>11) / (1 << 53) }

// between returns a number in [a, b).
func (k key) between(a, b float64) float64 { return a + (b-a)*k.unit() }

// pick returns a number in [0, n).
func (k key) pick(n int) int { return int(k.unit() * float64(n)) }

// norm returns a number of mean 0 and standard deviation 1: the sum of four
// uniform numbers, so it is nearly normal and never beyond 3.47.
func (k key) norm() float64 {
	sum := uint32(k)&0xffff + uint32(k>>16)&0xffff + uint32(k>>32)&0xffff + uint32(k>>48)
	return (float64(sum) - 2*65535) * (1.7320508 / 65535)
}

// lognorm returns a number whose logarithm is normal around that of the median.
func (k key) lognorm(median, sigma float64) float64 {
	return median * math.Exp(sigma*k.norm())
}

// happened counts the events of a stream in [0, age]: each interval of the given
// length holds exactly one, at a random place. Irregular, monotone, and countable
// at any age without looking at what came before.
func (k key) happened(age, interval float64) float64 {
	if age <= 0 || interval <= 0 {
		return 0
	}
	n := math.Floor(age / interval)
	if k.with(uint64(n)).unit() <= age/interval-n {
		n++
	}
	return n
}
