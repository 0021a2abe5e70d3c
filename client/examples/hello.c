/* SPDX-License-Identifier: Apache-2.0 */
/* The smallest trainer: sum one vector over all ranks. Run it with `gradrun -np 2 hello`. */
#include <err.h>
#include <stdio.h>
#include <stdlib.h>

#include <gradd/gradd.h>

int main(void)
{
    enum { COUNT = 4 };
    struct gradd *g;
    if (gradd_init(NULL, &g) != GRADD_OK) /* rank and job from the launcher's variables */
        errx(EXIT_FAILURE, "%s", gradd_error());

    float *grad = gradd_alloc(g, COUNT * sizeof *grad); /* shared with the worker: no copy */
    if (!grad)
        errx(EXIT_FAILURE, "%s", gradd_error());
    for (int i = 0; i < COUNT; i++)
        grad[i] = (float)(gradd_rank(g) + i);

    gradd_handle h = gradd_allreduce_async(g, "grad", grad, grad, COUNT, GRADD_F32, GRADD_SUM);
    /* compute something else here: the sum runs in the worker meanwhile */
    if (h < 0 || gradd_wait(g, h, -1) != GRADD_OK)
        errx(EXIT_FAILURE, "%s", gradd_error());

    printf("rank %d of %d: %g %g %g %g\n", gradd_rank(g), gradd_size(g), (double)grad[0],
           (double)grad[1], (double)grad[2], (double)grad[3]);
    gradd_free(g, grad);
    gradd_shutdown(g);
    return EXIT_SUCCESS;
}
