"""Pipeline-parallel schedules: made, checked, compared, and shown.

A schedule orders the passes of a model's stages over ranks. It is no ``PipelinePlan``, which
orders the tasks of one process. The public names are in ``swpipe.plans``.
"""
