"""autopar in trainers that people have already. Each module imports its own library; this package imports none.

transformers    a Trainer of transformers, whose model is planned and compiled
"""
