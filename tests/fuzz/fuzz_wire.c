/* SPDX-License-Identifier: Apache-2.0 */
/* Frames and envelopes: bytes of a stream, cut at places that the input chooses. What unpacks must
 * pack again, and the reader's memory stays within its bounds. */
#include <stdlib.h>

#include "wire.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check_packs_again(const Pb__Envelope *envelope)
{
    size_t n = pb__envelope__get_packed_size(envelope);
    uint8_t *bytes = malloc(n + 1);
    if (!bytes || pb__envelope__pack(envelope, bytes) != n)
        abort();
    free(bytes);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 1)
        return 0;
    size_t piece = data[0] ? data[0] : size;
    data++;
    size--;
    struct wire_in in;
    struct wire_frame frame;
    wire_in_init(&in);
    int rc = 0;
    while (size > 0 && rc >= 0) {
        size_t n = piece < size ? piece : size;
        if (wire_in_feed(&in, data, n) < 0)
            abort();
        data += n;
        size -= n;
        while ((rc = wire_in_next(&in, &frame)) == 1) {
            check_packs_again(frame.envelope);
            wire_frame_close_fds(&frame);
        }
    }
    if (in.arena_bytes > (size_t)256 * WIRE_FRAME_MAX)
        abort();
    wire_in_deinit(&in);
    return 0;
}
