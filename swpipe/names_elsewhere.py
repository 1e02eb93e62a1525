"""Hints for private names of recsys-examples' ``SWPipeline``, which have another name here."""

_WHERE = {
    "_defs _topo_order": "pipe.tasks has the tasks, in serial order",
    "_stage_map _stream_map _thread_group_map": "pipe.plan.schedule has each task's",
    "_enqueue_order _work_queues": "format_program() has each thread group's instructions",
    "_cuda_events _cpu_signals": "format_program() has the records and the waits",
    "_sequencer": "TaskSchedule(globally_ordered=True) is its meaning",
    "_submit_task _exec_task": "observe() is told of each; run_one_serial_iter() runs all",
    "_shortcut_tasks": "it is shortcut_tasks",
    "_shortcut_cache _apply_shortcut _capture_and_cache": "enable_shortcut() caches and replays",
}
"""The names, separated by spaces, and the hint for them."""


def where_it_is(name: str) -> str:
    """Return the message of the ``AttributeError`` for a name that ``SWPipeline`` does not have."""
    hint = "".join(f": {where}" for names, where in _WHERE.items() if name in names.split())
    return f"'SWPipeline' object has no attribute {name!r}{hint}"
