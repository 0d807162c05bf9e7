package series

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/prometheus/prometheus/model/labels"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// Any label set that Prometheus can hold comes back from its bytes, and equal bytes
// are equal sets.
func TestLabelBytesRoundTrip(t *testing.T) {
	text := rapid.StringMatching(`[A-Za-z_.é]{1,40}|x{100,300}`)
	rapid.Check(t, func(t *rapid.T) {
		set := rapid.MapOfN(text, text, 0, 12)
		a, b := labels.FromMap(set.Draw(t, "a")), labels.FromMap(set.Draw(t, "b"))
		ab, bb := LabelBytes(AppendLabels(nil, a)), LabelBytes(AppendLabels(nil, b))
		var builder labels.ScratchBuilder
		if got := ab.Labels(&builder); !labels.Equal(got, a) {
			t.Fatalf("got %s, want %s", got, a)
		}
		if ab.Len() != a.Len() {
			t.Fatalf("%d labels, want %d", ab.Len(), a.Len())
		}
		if (string(ab) == string(bb)) != labels.Equal(a, b) {
			t.Fatalf("bytes of %s and %s: equal is %v", a, b, string(ab) == string(bb))
		}
		a.Range(func(l labels.Label) {
			if string(ab.Get(l.Name)) != l.Value {
				t.Fatalf("label %s is %q, want %q", l.Name, ab.Get(l.Name), l.Value)
			}
		})
	})
}

func TestEmptyValuesAreAbsentLabels(t *testing.T) {
	require.Equal(t, AppendLabels(nil, labels.FromStrings("a", "1")), AppendLabels(nil, labels.FromStrings("a", "1", "pod", "")))
}

func TestDescriptionsPutTheNameFirstAndStayShortAndValid(t *testing.T) {
	dcgm := LabelBytes(AppendLabels(nil, labels.FromStrings("UUID", "GPU-1", "__name__", "DCGM_FI_DEV_GPU_TEMP", "gpu", "0")))
	require.Equal(t, `DCGM_FI_DEV_GPU_TEMP{UUID="GPU-1", gpu="0"}`, dcgm.String())

	var huge []byte
	for i := range 1000 {
		huge = AppendLabel(huge, fmt.Sprintf("l%04d", i), strings.Repeat("é", 5000))
	}
	var broken []byte
	broken = AppendLabel(broken, "__name__", "\xff")
	broken = AppendLabel(broken, "a\xfe", "\xff\xfe\x00")
	for name, b := range map[string]LabelBytes{"huge": huge, "broken": broken, "garbage": []byte("\x0a\xff\xff\xff"), "empty": nil} {
		text := b.String()
		require.True(t, utf8.ValidString(text), name)
		require.LessOrEqual(t, len(text), 900, name)
	}
}

func FuzzLabelBytes(f *testing.F) {
	f.Add([]byte(AppendLabel(nil, "a", "b")))
	f.Fuzz(func(t *testing.T, b []byte) {
		lb := LabelBytes(b)
		if !utf8.ValidString(lb.String()) {
			t.Errorf("description of %x is no UTF-8", b)
		}
		lb.Get("a")
		if n := lb.Len(); n > len(b)/6+1 {
			t.Errorf("%d labels in %d bytes", n, len(b))
		}
	})
}

func TestKindsSurviveWrappingAndMapToHTTP(t *testing.T) {
	for kind, status := range map[Kind]int{
		Internal: http.StatusInternalServerError, Invalid: http.StatusBadRequest, Limited: http.StatusTooManyRequests,
		Unavailable: http.StatusServiceUnavailable, Corrupt: http.StatusInternalServerError,
	} {
		err := fmt.Errorf("outer: %w", Errorf(kind, "inner: %w", errors.ErrUnsupported))
		require.Equal(t, kind, KindOf(err))
		require.ErrorIs(t, err, errors.ErrUnsupported)
		require.Equal(t, status, kind.HTTPStatus())
	}
	require.Equal(t, Internal, KindOf(errors.New("nobody's")))
	require.Equal(t, Unavailable, KindOf(fmt.Errorf("ended: %w", context.Canceled)))
}

func TestRefusals(t *testing.T) {
	var a, b Refusals
	a.Add(ReasonTooOld, 2, func() string { return "first" })
	a.Add(ReasonConflict, 1, func() string { t.Error("only the first is put in words"); return "" })
	a.Add(ReasonTooOld, 1, nil)
	a.Add(ReasonInvalidUTF8, 0, nil)
	require.Equal(t, "first; refused 4 in all (conflicting_value: 1, too_old: 3)", a.Error())
	b.Merge(&a)
	require.Equal(t, a.Error(), b.Error())
	a.Reset()
	require.Zero(t, a.Total())
}
