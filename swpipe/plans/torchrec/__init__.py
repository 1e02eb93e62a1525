"""Ready-made plans of the training step on TorchRec: ours, HSTU's, the click job's."""
