"""Ready-made plans of the training step on TorchRec: swpipe's own and HSTU's."""
