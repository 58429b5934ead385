/* Activations of a gated MLP, by the constant GATE: SiLU, GELU, or GELU by tanh (glu.rs has the same). */
DEVICE float activated(float x)
{
	if (GATE == SILU)
		return x * (1.0f / (1.0f + expf(-x)));
	if (GATE == GELU)
		return x * (0.5f * (1.0f + erff(x * 0.70710678f)));
	/* 2 / sqrt(pi) / sqrt(2) */
	return x * (0.5f * (1.0f + tanhf(0.79788456f * (x + 0.044715f * x * x * x))));
}

/* Of sums that are rounded as products are: activation(gate) · up. */
DEVICE float gated(float gate, float up) { return activated((float)(Element)gate) * (float)(Element)up; }
