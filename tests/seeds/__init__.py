"""The requirements that the project began with, one test each: what the schedulers of oDriver, transformers, Cacheflow,
AstrAI and RoseLLM promise (R-), defects of theirs that must not exist here (N-), and the rule here where they disagree
(C-). A test's docstring is its requirement; ``python -m tests.seeds.table`` prints all of them with their results.
"""
