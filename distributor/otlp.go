package distributor

import "net/http"

type otlpDecoder struct{}

func (d *Distributor) serveOTLP(w http.ResponseWriter, r *http.Request) {
	http.Error(w, "not built yet", http.StatusNotImplemented)
}
