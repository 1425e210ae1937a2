// A small GEMM with TMA, wgmma and a pipeline, and with a mistake for each value of `fault`, which the emulator must
// find.
//
// out[64 · block …, 64] = bfloat16(a[64 · block …, k] · b[64, k]ᵀ + bias). A cluster of two blocks: each loads its rows
// of a, and half of b for both. Warp 4 is the producer of a pipeline of two stages; warps 0 … 3 are the consumers.
#include "ptx.cuh"
#include "wgmma.cuh"

constexpr int stages = 2, a_bytes = 64 * 128, b_bytes = 64 * 128, stage_bytes = a_bytes + b_bytes, staging = 64 * 128;
constexpr int barriers = staging + stages * stage_bytes;
static_assert(config::shared_bytes == barriers + 2 * stages * sizeof(ptx::Mbarrier));

struct Stage {
    int index = 0;
    uint32_t parity = 0;
    __device__ void advance() {
        if (++index == stages) index = 0, parity ^= 1;
    }
};

extern "C" __global__ void __launch_bounds__(256, 1)
    pipeline(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b,
             const __grid_constant__ TensorMap out, const float* bias, int k, int fault) {
    using namespace config;
    uint8_t* shared = ptx::dynamic_shared();
    auto* full = reinterpret_cast<ptx::Mbarrier*>(shared + barriers);
    ptx::Mbarrier* empty = full + stages;
    const int thread = threadIdx.x, warp = thread / 32, lane = ptx::lane_id();
    const int rank = ptx::cluster_ctarank(), row = blockIdx.x * 64;

    if (thread == 0) {
        for (int i = 0; i < stages; ++i) {
            full[i].init(1);
            empty[i].init(4 * 2);
        }
        if (fault == mbarrier_initialized_twice) full[0].init(1);
        if (fault != no_init_fence) ptx::fence_mbarrier_init();
    }
    if (fault != no_sync_after_init) ptx::cluster_sync();

    if (warp >= 4) {
        if (fault == half_of_the_warps_setmaxnreg ? warp < 6 : fault != no_setmaxnreg_dec) ptx::setmaxnreg_dec<40>();
        if (thread == 128) {
            Stage stage;
            for (int i = 0; i < k; i += 128, stage.advance()) {
                uint8_t* tiles = shared + staging + stage.index * stage_bytes + (fault == unaligned_tile ? 16 : 0);
                if (fault != no_producer_acquire) empty[stage.index].wait(stage.parity ^ 1);
                if (fault == acquire_with_another_parity) empty[stage.index].wait(stage.parity);
                const int more = fault == expects_too_much ? 16 : fault == expects_too_little ? -16 : 0;
                full[stage.index].arrive_expect_tx(stage_bytes + more);
                if (fault == arrives_twice) full[stage.index].arrive();
                ptx::tma_load(tiles, &a, &full[stage.index], i, row, 0);
                const uint16_t to = fault == one_block_gets_b ? 1 << rank : fault == no_such_block ? 7 : 3;
                uint8_t* half = tiles + a_bytes + rank * b_bytes / 2;
                ptx::tma_load_multicast(half, &b, &full[stage.index], i, 32 * rank, 0, to);
            }
        }
    } else {
        ptx::setmaxnreg_inc<256>();
        float d[32];
        Stage stage;
        for (int i = 0; i < k; i += 128, stage.advance()) {
            const uint8_t* tiles = shared + staging + stage.index * stage_bytes;
            auto release = [&] {
                if (fault == one_warp_releases_for_all ? warp == 0 && lane < 8 : lane < 2)
                    empty[stage.index].arrive_cluster(lane % 2);
            };
            if (fault != no_consumer_wait)
                full[stage.index].wait(fault == wrong_parity ? stage.parity ^ 1 : stage.parity);
            if (fault != no_wgmma_fence) ptx::wgmma_fence();
            for (int step = 0; step < 4; ++step) {
                const int other = fault == descriptors_differ && warp == 1 ? 2 : fault == tile_off_its_swizzle ? 8 : 0;
                ptx::wgmma(d, ptx::wgmma_descriptor(tiles) + 2 * step + other,
                           ptx::wgmma_descriptor(tiles + a_bytes) + 2 * step, i > 0 || step > 0);
                if (fault == accumulator_written_in_flight && step == 1) d[3] = 0;
            }
            if (fault != no_wgmma_commit) ptx::wgmma_commit_group();
            if (fault == released_too_early) release();
            if (fault != no_wgmma_wait) ptx::wgmma_wait_group<0>();
            if (fault != released_too_early && fault != never_released) release();
        }
        if (fault == accumulator_read_in_flight) {
            ptx::wgmma_fence();
            ptx::wgmma(d, ptx::wgmma_descriptor(shared + staging), ptx::wgmma_descriptor(shared + staging), true);
            ptx::wgmma_commit_group();
        }

        for (int j = 0; j < 32; ++j)
            d[j] += __ldg(bias + j / 4 * 8 + lane % 4 * 2 + j % 2 + (fault == reads_past_the_bias));
        if (fault == accumulator_read_in_flight) ptx::wgmma_wait_group<0>();
        for (int j = 0; j < 8; j += 2) {
            const int r = 16 * warp + lane % 16, chunk = (j + lane / 16) ^ (r % 8);
            const float* x = d + 4 * j;
            ptx::stmatrix_x4(shared + 128 * r + 16 * chunk + (fault == unaligned_matrix), ptx::pack_bf16(x[0], x[1]),
                             ptx::pack_bf16(x[2], x[3]), ptx::pack_bf16(x[4], x[5]), ptx::pack_bf16(x[6], x[7]));
        }
        if (fault != no_fence_before_store && (fault != one_fence_before_store || thread == 0))
            ptx::fence_proxy_async();
        const int threads = fault == threads_differ && warp == 2 ? 64 : fault == a_warp_too_many ? 160 : 128;
        if (fault != no_barrier_before_store) ptx::named_barrier_sync(1, threads);
        if (thread == 0) {
            ptx::tma_store(&out, shared, 0, row, 0);
            if (fault != no_store_commit) ptx::bulk_commit_group();
            if (fault != no_store_wait) ptx::bulk_wait_group_read<0>();
            if (fault == past_shared_memory) shared[config::shared_bytes] = 0;
            if (fault == over_an_mbarrier) shared[barriers + 3] = 0;
            if (fault == polls_for_ever)
                while (true) atomicAdd(reinterpret_cast<int*>(shared), 0);
        }
    }
    if (fault == over_an_mbarrier) full[0].wait(1);
    if (fault != ends_before_its_peer) ptx::cluster_sync();
}
