/* Several matrices in one launch, as PyTorch's multi_tensor_apply: a block of threads has CHUNK elements of one of them, whose buffers the
 * launcher writes in front of this.
 */
__device__ inline u32 chunks(u64 elements) { return (u32)((elements + CHUNK - 1) / CHUNK); }

/* This block's matrix; `block` becomes the block among the matrix's. */
template <class Matrix> __device__ inline u32 matrix_of(const Matrix *matrices, u32 &block)
{
	u32 matrix = 0;
	for (; matrix + 1 < MATRICES; matrix++) {
		const u32 all = chunks(matrices[matrix].elements);
		if (block < all)
			break;
		block -= all;
	}
	return matrix;
}
