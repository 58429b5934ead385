/* Instructions of PTX that kernels in CUDA C++ use. The stand-in for a GPU (tests/cuda/ptx.h) has functions of the same names.
 * Addresses of shared memory are bytes from its beginning.
 */
#ifdef __CUDACC__
#define DEVICE __device__ __forceinline__

DEVICE u32 shared_address(const void *place) { return (u32)__cvta_generic_to_shared(place); }

/* Sixteen bytes of global memory to shared memory, in the background; zeros where they are not wanted. */
DEVICE void copy_async(u32 to, const void *from, bool wanted)
{
	u32 bytes = wanted ? 16 : 0;
	asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" : : "r"(to), "l"(from), "r"(bytes) : "memory");
}
DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;" : : : "memory"); }
/* Waits for all groups of this thread's copies but the last ones. */
template <int LAST> DEVICE void copy_async_wait() { asm volatile("cp.async.wait_group %0;" : : "n"(LAST) : "memory"); }

/* Four matrices of 8 × 8 numbers; lanes 8i to 8i + 7 have the addresses of the rows of the i-th. */
DEVICE void load_matrices(u32 (&to)[4], u32 row)
{
	asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
	             : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(row) : "memory");
}
DEVICE void load_matrices_transposed(u32 (&to)[4], u32 row)
{
	asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
	             : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(row) : "memory");
}

/* A warp adds a product of 16 × 16 and 16 × 8 numbers to its sums. */
DEVICE void multiply_add(float (&sums)[4], const u32 (&a)[4], u32 b0, u32 b1)
{
	asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." ELEMENT "." ELEMENT ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
	             : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* 2^x, within two units in the last place. */
DEVICE float exp2_approx(float x)
{
	float y;
	asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
	return y;
}

/* Two numbers in half precision, the first in the lower bits. */
DEVICE u32 pack_pair(float first, float second)
{
	u32 pair;
	asm("cvt.rn." ELEMENT "x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
	return pair;
}

#if WARPGROUPS
/* What this thread wrote to shared memory is there for wgmma. */
DEVICE void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" : : : "memory"); }
DEVICE void warpgroup_arrive() { asm volatile("wgmma.fence.sync.aligned;" : : : "memory"); }
DEVICE void warpgroup_commit() { asm volatile("wgmma.commit_group.sync.aligned;" : : : "memory"); }
DEVICE void warpgroup_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" : : : "memory"); }

/* A warpgroup begins to add a product of 64 × 16 and 16 × 128 numbers to its sums, or of 16 × 64. */
template <bool A_BY_INPUTS, bool B_BY_INPUTS> DEVICE void warpgroup_multiply_add(float (&d)[64], u64 a, u64 b)
{
	asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." ELEMENT "." ELEMENT " "
	             "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, "
	             "%25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
	             "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, %64, %65, 1, 1, 1, %66, %67;"
	             : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
	               "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]),
	               "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]),
	               "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]),
	               "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]),
	               "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]),
	               "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]),
	               "+f"(d[63])
	             : "l"(a), "l"(b), "n"(A_BY_INPUTS ? 0 : 1), "n"(B_BY_INPUTS ? 0 : 1));
}
template <bool A_BY_INPUTS, bool B_BY_INPUTS> DEVICE void warpgroup_multiply_add(float (&d)[32], u64 a, u64 b)
{
	asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." ELEMENT "." ELEMENT " "
	             "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, "
	             "%25, %26, %27, %28, %29, %30, %31}, %32, %33, 1, 1, 1, %34, %35;"
	             : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
	               "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]),
	               "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]),
	               "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
	             : "l"(a), "l"(b), "n"(A_BY_INPUTS ? 0 : 1), "n"(B_BY_INPUTS ? 0 : 1));
}
#endif
#else
#define DEVICE inline
#endif
