"""TorchRec's own tests of its pipelines, on swpipe's: ``make peer-tests TORCHREC_TESTS=path``.

The tests are read from a checkout of TorchRec of the installed version; they are not copied here.
"""
