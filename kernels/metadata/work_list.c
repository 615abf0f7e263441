/* A step's LoRA metadata straight from its runs into the staging buffer, for the host's speed.
 *
 * The truth, word for word, is work_list.py and host_fields.py; native.py calls this.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

enum { CLASSES = 4, WHOLE = -1 };

static int class_of(int32_t rank, const int32_t *classes) {
    int index = 0;
    while (index < CLASSES - 1 && rank > classes[index]) index++;
    return index;
}

/* Most slots have few rows, and a division takes longest. */
static int64_t pieces(int32_t rows, int32_t per_piece) {
    return rows <= per_piece ? rows > 0 : 1 + (rows - 1) / per_piece;
}

/* The number as int32; 0 and *good cleared for what is none. */
static int32_t number_of(PyObject *value, int *good) {
    int beyond = 0;
    long number = PyLong_AsLongAndOverflow(value, &beyond); /* beyond: -1, without an error */
    if (number == -1 && (beyond || PyErr_Occurred())) *good = 0;
    if (number != (int32_t)number) *good = 0;
    return *good ? (int32_t)number : 0;
}

/* pairs(runs, out): the (slot, rows) of a tuple as out's int32. False: some are no pairs of such. Of no list: a
 * number's __index__ could change it while it is read. */
static PyObject *pairs(PyObject *self, PyObject *args) {
    PyObject *runs;
    Py_buffer out;
    if (!PyArg_ParseTuple(args, "Ow*", &runs, &out)) return NULL;
    int32_t *at = out.buf;
    Py_ssize_t number = out.len / 8;
    int good = PyTuple_Check(runs) && PyTuple_GET_SIZE(runs) == number;
    for (Py_ssize_t i = 0; i < number && good; i++) {
        PyObject *pair = PyTuple_GET_ITEM(runs, i);
        good = PyTuple_Check(pair) && PyTuple_GET_SIZE(pair) == 2;
        for (int j = 0; j < 2 && good; j++) *at++ = number_of(PyTuple_GET_ITEM(pair, j), &good);
    }
    PyErr_Clear();
    PyBuffer_Release(&out);
    return PyBool_FromLong(good);
}

/* count(runs, ranks, classes, totals, max_rows, per_item, per_tile): rows per slot into totals[1 + slot], base
 * rows into totals[0]; totals has room for twice as many, where `write` counts places.
 * Returns (rows, active slots, their highest rank, rows of each rank class, base rows, items, tiles): how many
 * pieces of per_item and of per_tile rows the adapters' rows make. None for runs that cannot be: the caller
 * finds out why. */
static PyObject *count(PyObject *self, PyObject *args) {
    Py_buffer runs, ranks, classes, totals;
    Py_ssize_t max_rows;
    int per_item, per_tile;
    if (!PyArg_ParseTuple(args, "y*y*y*w*nii", &runs, &ranks, &classes, &totals, &max_rows, &per_item, &per_tile))
        return NULL;
    const int32_t *run = runs.buf, *rank = ranks.buf;
    int32_t *total = totals.buf;
    Py_ssize_t number = runs.len / 8, slots = ranks.len / 4;
    int64_t rows = 0, items = 0, tiles = 0, class_rows[CLASSES] = {0};
    int32_t highest = 0, active = 0, good = per_item > 0 && per_tile > 0;
    good = good && totals.len / 8 == slots + 1 && classes.len / 4 == CLASSES;
    for (Py_ssize_t s = 0; s <= slots && good; s++) total[s] = 0;
    for (Py_ssize_t i = 0; i < number && good; i++) {
        int32_t slot = run[2 * i], length = run[2 * i + 1];
        good = slot >= -1 && slot < slots && length >= 0 && rows + length <= max_rows;
        if (!good) break;
        total[slot + 1] += length;
        rows += length;
    }
    for (Py_ssize_t s = 0; s < slots && good; s++) {
        int32_t own = total[s + 1];
        if (own == 0) continue;
        active++;
        items += pieces(own, per_item), tiles += pieces(own, per_tile);
        class_rows[class_of(rank[s], classes.buf)] += own;
        if (rank[s] > highest) highest = rank[s];
    }
    int32_t base = good ? total[0] : 0;
    PyBuffer_Release(&runs);
    PyBuffer_Release(&ranks);
    PyBuffer_Release(&classes);
    PyBuffer_Release(&totals);
    if (!good) Py_RETURN_NONE;
    return Py_BuildValue("Lii(LLLL)iLL", (long long)rows, active, highest, (long long)class_rows[0],
                         (long long)class_rows[1], (long long)class_rows[2], (long long)class_rows[3], base,
                         (long long)items, (long long)tiles);
}

static int32_t *entry(int32_t *out, int32_t slot, int32_t start, int32_t rows, int32_t part) {
    out[0] = slot, out[1] = start, out[2] = rows, out[3] = part;
    return out + 4;
}

/* One slot's rows [start, start + rows), cut; each piece `copies` times, numbered, or once as a whole. */
static int32_t *cut(int32_t *out, int32_t slot, int32_t start, int32_t rows, int32_t per_piece, int copies) {
    for (int32_t done = 0; done < rows; done += per_piece) {
        int32_t here = rows - done < per_piece ? rows - done : per_piece;
        if (copies == 0) out = entry(out, slot, start + done, here, WHOLE);
        for (int part = 0; part < copies; part++) out = entry(out, slot, start + done, here, part);
    }
    return out;
}

static void fill(int32_t *field, Py_ssize_t from, Py_ssize_t to, int32_t value) {
    for (Py_ssize_t i = from; i < to; i++) field[i] = value;
}

static void ascend(int32_t *field, Py_ssize_t number, int32_t value) {
    for (Py_ssize_t i = 0; i < number; i++) field[i] = value + (int32_t)i;
}

static void idle(int32_t *entries, Py_ssize_t from, Py_ssize_t to) {
    for (Py_ssize_t i = from; i < to; i++) entry(entries + 4 * i, -1, 0, 0, 0);
}

/* high(totals, ranks, per_piece, limit): pieces of the slots with ranks above the limit. */
static PyObject *high(PyObject *self, PyObject *args) {
    Py_buffer totals, ranks;
    int per_piece, limit;
    int64_t number = 0;
    if (!PyArg_ParseTuple(args, "y*y*ii", &totals, &ranks, &per_piece, &limit)) return NULL;
    const int32_t *total = totals.buf, *rank = ranks.buf;
    for (Py_ssize_t s = 0; s < ranks.len / 4; s++)
        if (rank[s] > limit) number += pieces(total[s + 1], per_piece);
    PyBuffer_Release(&totals);
    PyBuffer_Release(&ranks);
    return PyLong_FromLongLong(number);
}

/* write(fields, used, sizes, runs, ranks, totals, per_item, per_tile, limit, copies): the fields of
 * meta.py, one behind the other as `sizes` says. used: entries that the last write filled of items,
 * tiles, slots and rows; now this one's. Slots of ranks above `limit` come first, each piece `copies` times.
 * per_tile 0: no tiles. */
static PyObject *write_fields(PyObject *self, PyObject *args) {
    Py_buffer fields, used, sizes, runs, ranks, totals;
    int per_item, per_tile, limit, copies;
    if (!PyArg_ParseTuple(args, "w*w*y*y*y*w*iiii", &fields, &used, &sizes, &runs, &ranks, &totals, &per_item,
                          &per_tile, &limit, &copies))
        return NULL;
    const int32_t *size = sizes.buf, *run = runs.buf, *rank = ranks.buf, *total = totals.buf;
    int32_t *items = fields.buf, *tiles = items + size[0], *counts = tiles + size[1], *starts = counts + size[2];
    int32_t *ids = starts + size[3], *mapping = ids + size[4], *order = mapping + size[5], *before = used.buf;
    int32_t slots = size[2], active = 0, place = 0, row = 0;
    int32_t *next = (int32_t *)totals.buf + slots + 1; /* each slot's next place */
    starts[0] = 0;
    for (int32_t s = 0; s < slots; s++) {
        next[s + 1] = place;
        if (total[s + 1] == 0) continue;
        counts[active] = total[s + 1], ids[active] = s;
        place += total[s + 1];
        starts[++active] = place;
    }
    next[0] = place;
    fill(counts, active, slots, 0);
    fill(ids, active, slots, -1);
    fill(starts, active + 1, slots + 1, place);
    int32_t *item = items, *tile = tiles;
    for (int pass = 1; pass >= 0; pass--)
        for (int32_t a = 0; a < active; a++)
            if ((rank[ids[a]] > limit) == pass)
                item = cut(item, ids[a], starts[a], counts[a], per_item, pass ? copies : 0);
    for (int32_t a = 0; a < active && per_tile; a++) tile = cut(tile, ids[a], starts[a], counts[a], per_tile, 0);
    for (Py_ssize_t i = 0; i < runs.len / 8; i++) {
        int32_t slot = run[2 * i], rows = run[2 * i + 1];
        int32_t *at = order + next[slot + 1];
        if (rows == 1) {
            mapping[row] = slot, *at = row;
        } else {
            fill(mapping, row, row + rows, slot);
            ascend(at, rows, row);
        }
        next[slot + 1] += rows, row += rows;
    }
    int32_t now[4] = {(item - items) / 4, (tile - tiles) / 4, active, row};
    idle(items, now[0], before[0]);
    idle(tiles, now[1], before[1]);
    fill(mapping, row, before[3], -1);
    fill(order, row, before[3], 0);
    for (int i = 0; i < 4; i++) before[i] = now[i];
    PyBuffer_Release(&fields);
    PyBuffer_Release(&used);
    PyBuffer_Release(&sizes);
    PyBuffer_Release(&runs);
    PyBuffer_Release(&ranks);
    PyBuffer_Release(&totals);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"pairs", pairs, METH_VARARGS, NULL}, {"count", count, METH_VARARGS, NULL}, {"high", high, METH_VARARGS, NULL},
    {"write", write_fields, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL},
};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "lorafleet_work_list", NULL, -1, methods};

PyMODINIT_FUNC PyInit_lorafleet_work_list(void) { return PyModule_Create(&module); }
