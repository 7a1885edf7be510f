/* Memory that a daemon (`hugemm pool serve`) has filled with huge pages before it is asked for.
 *
 *     hugemm_lease *lease = hugemm_lease_take(1ull << 30, NULL);
 *     if (!lease)
 *         errx(1, "%s", hugemm_lease_error());
 *     void *memory = hugemm_lease_map(lease);
 *
 * Build the library with `cargo build --release -p hugemm-lease-c`; link with libhugemm_lease_c.a -lpthread -ldl -lm. */
#ifndef HUGEMM_LEASE_H
#define HUGEMM_LEASE_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A lease. It ends with hugemm_lease_end, or with the process. Its functions may be called by one thread at a time. */
typedef struct hugemm_lease hugemm_lease;

/* What is wanted. All of it may be zero. */
struct hugemm_lease_options {
    const char *socket; /* Where the daemon listens; NULL: the default. */
    const char *page;   /* "2M", "1G" or "thp"; NULL: whatever the daemon has. */
    const int *node;    /* From which NUMA node; NULL: any. */
    const char *keep;   /* Keeps the memory under this name; NULL: does not. */
    const char *secret; /* The file with the secret of kept memory: the first lease makes it. */
};

/* Leases `bytes` of zeroed memory, or, of a name that is kept already, memory with its bytes. Waits for filling if less is ready.
 * NULL on error. */
hugemm_lease *hugemm_lease_take(uint64_t bytes, const struct hugemm_lease_options *options);

/* The file, closed on exec: to be mapped shared, or handed on. It is the lease's, and closed with it. */
int hugemm_lease_fd(const hugemm_lease *lease);

/* A shared, writable mapping of all of it; the same one at each call. It is the lease's, and unmapped with it. NULL on error. */
void *hugemm_lease_map(hugemm_lease *lease);

/* 1 if the memory was kept and has its former bytes, else 0. */
int hugemm_lease_resumed(const hugemm_lease *lease);

/* Unmaps, closes and ends. NULL is nothing to end. */
void hugemm_lease_end(hugemm_lease *lease);

/* Why the last call of this thread failed, with the way out, on one line. Good until its next one. */
const char *hugemm_lease_error(void);

#ifdef __cplusplus
}
#endif
#endif
