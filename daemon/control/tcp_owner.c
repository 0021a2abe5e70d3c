/* SPDX-License-Identifier: Apache-2.0 */
/* Read from the kernel's tables in /proc, as text: proc(5), /proc/net/tcp. */
#include "control/tcp_owner.h"

#include <netinet/in.h>
#include <stdio.h>
#include <string.h>

enum {
    STATE_ESTABLISHED = 1,
};

/* "0100007F:1B62": the address in words of the machine's byte order. */
static void format(const struct peer_address *address, char *out_text, size_t size)
{
    const void *bytes;
    size_t n_words;
    if (address->socket.ss_family == AF_INET) {
        bytes = &((const struct sockaddr_in *)&address->socket)->sin_addr;
        n_words = 1;
    } else {
        bytes = &((const struct sockaddr_in6 *)&address->socket)->sin6_addr;
        n_words = 4;
    }
    size_t used = 0;
    for (size_t i = 0; i < n_words; i++) {
        uint32_t word;
        memcpy(&word, (const char *)bytes + i * sizeof word, sizeof word);
        used += (size_t)snprintf(out_text + used, size - used, "%08X", word);
    }
    snprintf(out_text + used, size - used, ":%04X", resolve_port(address));
}

static bool find(const char *path, const char *local, const char *remote, uid_t *out_uid)
{
    FILE *file = fopen(path, "re");
    if (!file)
        return false;
    char line[512], own[64], other[64];
    unsigned state, uid;
    bool is_found = false;
    while (!is_found && fgets(line, sizeof line, file)) {
        if (sscanf(line, " %*u: %63s %63s %x %*s %*s %*s %u", own, other, &state, &uid) != 4)
            continue;
        is_found =
            state == STATE_ESTABLISHED && strcmp(own, local) == 0 && strcmp(other, remote) == 0;
    }
    fclose(file);
    if (is_found)
        *out_uid = uid;
    return is_found;
}

bool tcp_owner(const struct peer_address *local, const struct peer_address *remote, uid_t *out_uid)
{
    char own[64], other[64];
    format(local, own, sizeof own);
    format(remote, other, sizeof other);
    /* The two ends may be of different families when one maps IPv4 into IPv6: then nobody is found
     * and the connection is refused. Without a key the daemon binds and dials plain addresses. */
    return find(local->socket.ss_family == AF_INET ? "/proc/net/tcp" : "/proc/net/tcp6", own, other,
                out_uid);
}
