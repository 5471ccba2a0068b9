"""Gates that learn which groups keep full attention: their mathematics, apart from any training."""
