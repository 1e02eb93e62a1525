"""Skip the tests of pipeline-parallel training on a torch that was not tested."""

try:
    import swpipe.tasks.pipeline_parallel.torch_pipelining  # noqa: F401
except ImportError:
    collect_ignore_glob = ["test_*.py"]
