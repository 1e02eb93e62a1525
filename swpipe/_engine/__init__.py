"""The engine, which compiles a plan and runs it: instructions, threads, waits and failures."""
