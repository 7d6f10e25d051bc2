"""Models for other runtimes: a graph (ONNX or torch.export), its preprocessing, and an example."""
