// Work that is split over torch's threads. The kernels have no threads of their own, and need no OpenMP.

#pragma once

#include "platform.h"
#include "kernels.h"

namespace ghostnoise::GN_ISA {

template <class Work> struct Shares {
    const Work &work;
    i64 count, shares;

    GN_NOINLINE static void run(void *context, i64 share) {
        const Shares &self = *static_cast<Shares *>(context);
        self.work(self.count * share / self.shares, self.count * (share + 1) / self.shares, share);
    }
};

// Runs work(begin, end, share) over consecutive parts of `count` units, at most one for each thread; with one thread in
// the caller, without waking others.
template <class Work> void in_parallel(i64 threads, i64 count, const Work &work) {
    Shares<Work> shares = {work, count, threads < count ? threads : count};
    if (shares.shares > 1)
        run_shares(shares.shares, Shares<Work>::run, &shares);
    else if (count > 0)
        Shares<Work>::run(&(shares.shares = 1, shares), 0);
}

}  // namespace ghostnoise::GN_ISA
