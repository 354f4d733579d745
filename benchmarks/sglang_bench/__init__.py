"""Real SGLang under the control plane, measured: see `scripts/h200_sglang`."""
