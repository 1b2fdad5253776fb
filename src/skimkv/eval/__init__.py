"""Quality and its price: tasks, methods on one shared prompt, records of their answers, tuning, figures.

An evaluation runs from top to bottom: tasks/ and sweeps.py say what there is, plan.py decides what to run, run.py
carries it out (shared_prompt.py reads a prompt, answer.py answers, traffic.py counts), results.py keeps the records and
summarises them, panels.py and figures.py draw them.
"""
