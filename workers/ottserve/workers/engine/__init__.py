"""The engine: plan → tensors → logits → tokens → events. Knows no thread, no Ray and no gRPC."""
