"""One step of training or inference: arguments in, autograd, microbatches, results out."""
