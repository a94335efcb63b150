"""autopar in trainers that people have already. Each module imports its own library; this package imports none.

transformers    a Trainer of transformers, whose model is planned and compiled
torchtitan      torchtitan's Trainer, by a parallelize_fn that plans and compiles
planning        how to plan, as their users say it
"""
