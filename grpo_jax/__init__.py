"""Post-train language policies with GRPO and GDPO in JAX."""
