"""What a plan may choose, and its price: strategies of operators, specs of inputs and outputs, reshards, pins."""
