"""The mathematics of gates that learn which groups keep full attention, without the training."""
