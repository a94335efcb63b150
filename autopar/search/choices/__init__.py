"""What a plan may choose: strategies of operators, specs of inputs, prices of reshards, pins."""
