"""Ready-made plans of the training step on TorchRec: ours, and HSTU's."""
