package fleet

type nullSource struct{}

func (nullSource) refresh(int64) bool     { return true }
func (nullSource) groups() []*group       { return nil }
func (nullSource) slowness(int64) float64 { return 1 }

func newCoolingSource(f *Fleet, tg *Target, replica int) source  { return nullSource{} }
func newTrainingSource(f *Fleet, tg *Target, replica int) source { return nullSource{} }
func newVLLMSource(f *Fleet, tg *Target, replica int) source     { return nullSource{} }
func newHostSource(f *Fleet, tg *Target, replica int) source     { return nullSource{} }

type vllmModel struct{ short, name string }

var vllmModels = [...]vllmModel{
	{"llama-8b", "meta-llama/Llama-3.1-8B-Instruct"}, {"llama-70b", "meta-llama/Llama-3.3-70B-Instruct"},
	{"qwen-32b", "Qwen/Qwen3-32B"}, {"mixtral", "mistralai/Mixtral-8x22B-Instruct-v0.1"},
}
