"""Training on SageMaker: what is submitted, and what runs in the container."""
