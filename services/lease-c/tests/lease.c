/* Run by tests/clients.rs, with the socket of a daemon and the path of a secret that is not there yet. */
#include <assert.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "hugemm_lease.h"

#define SIZE (4u << 20)

int main(int argc, char **argv)
{
    struct hugemm_lease_options options = { 0 };
    int node = -1;
    struct stat file;
    assert(argc == 3);
    options.socket = argv[1];

    options.page = "4K";
    assert(!hugemm_lease_take(SIZE, &options) && strstr(hugemm_lease_error(), "none of 2M, 1G and thp"));
    options.page = "2M";
    assert(!hugemm_lease_take(5, &options) && strstr(hugemm_lease_error(), "not a multiple"));
    options.node = &node;
    assert(!hugemm_lease_take(SIZE, &options) && strstr(hugemm_lease_error(), "-1 is no node"));
    /* The daemon's memory is of no one node. */
    node = 0;
    assert(!hugemm_lease_take(SIZE, &options) && strstr(hugemm_lease_error(), "node"));
    options.node = NULL;
    hugemm_lease_end(NULL);

    hugemm_lease *lease = hugemm_lease_take(SIZE, &options);
    if (!lease) {
        fprintf(stderr, "%s\n", hugemm_lease_error());
        return 1;
    }
    assert(!hugemm_lease_resumed(lease));
    assert(fstat(hugemm_lease_fd(lease), &file) == 0 && file.st_size == SIZE);
    char *memory = hugemm_lease_map(lease);
    assert(memory && memory == hugemm_lease_map(lease));
    for (unsigned i = 0; i < SIZE; i++)
        assert(memory[i] == 0);
    memset(memory, 7, SIZE);
    hugemm_lease_end(lease);

    options.keep = "cache";
    assert(!hugemm_lease_take(SIZE, &options) && strstr(hugemm_lease_error(), "secret"));
    options.secret = argv[2];
    for (int run = 0; run < 2; run++) {
        lease = hugemm_lease_take(SIZE, &options);
        if (!lease) {
            fprintf(stderr, "%s\n", hugemm_lease_error());
            return 1;
        }
        memory = hugemm_lease_map(lease);
        assert(memory && hugemm_lease_resumed(lease) == run);
        assert(run == 0 || !memcmp(memory, "weights", 8));
        memcpy(memory, "weights", 8);
        hugemm_lease_end(lease);
    }
    puts("ok");
    return 0;
}
