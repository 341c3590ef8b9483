/* Parses the records of a response in CBOR into Arrow views, without an object or a copy for each, and into columns.

It accepts the form in which the service writes records, and parses it as cbor2 would. It declines any other form, which
cbor2 parses then. Every read is preceded by a bounds check, and the response is never written to.

viewed(body) -> (datas, numbers, keys, arrived, sealed, begin, end) | None
  Return views of 16 bytes of data, numbers and keys, and times of 8 bytes. The array of records is body[begin:end].
columns(body, datas, numbers, keys, arrived) -> (datas, numbers, keys, arrived)
  Return lists with an object for each value; times are in seconds.
records(kind, datas, numbers, subs, keys, hash_keys, arrived, aggregated)
  Return an iterator of `kind`, a named tuple.
*/

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

enum { NUMBER = 0x00, BYTES = 0x40, TEXT = 0x60, ARRAY = 0x80, MAP = 0xA0, TAG = 0xC0 }; /* kinds of items */
enum { KIND = 0xE0, TOLD = 0x1F, MAP_OPEN = 0xBF, TIME = 0xC1, BREAK = 0xFF };
enum { VIEW = 16, HELD = 12, DEPTH = 64 };

static const char RECORDS[] = "\x67Records", DATA[] = "\x64" "Data", KEY[] = "\x6cPartitionKey";
static const char SEQUENCE[] = "\x6eSequenceNumber", ENCRYPTION[] = "\x6e" "EncryptionType";
static const char ARRIVED[] = "\x78\x1b" "ApproximateArrivalTimestamp";
static const unsigned char MAGIC[] = {0xF3, 0x89, 0x9A, 0xC2};

#define LIMIT ((Py_ssize_t)1 << 31) /* views have 32-bit offsets */
#define LATEST ((int64_t)1 << 50)   /* later than any time in milliseconds */
#define MILLISECONDS 100000000000LL

typedef struct {
    const unsigned char *body;
    Py_ssize_t size;
} Answer;

/* A growing buffer. */
typedef struct {
    char *bytes;
    size_t size, room;
} Column;

static void *added(Column *column, size_t size) {
    if (column->room - column->size < size) {
        size_t room = column->room ? 2 * column->room : 4096;
        char *bytes = PyMem_Realloc(column->bytes, room);
        if (!bytes) return NULL;
        column->bytes = bytes;
        column->room = room;
    }
    void *place = column->bytes + column->size;
    column->size += size;
    return place;
}

/* Parsing functions return the offset after what they read, DECLINED for another form, or FAILED with an exception. */
enum { DECLINED = -1, FAILED = -2 };

#define HAS(count) ((count) <= answer->size - at)

/* Read the head of an item; *told is its number, or -1 if the length is indefinite. Return where the head ends. */
static Py_ssize_t head(const Answer *answer, Py_ssize_t at, int64_t *told) {
    if (!HAS(1)) return DECLINED;
    const unsigned char *from = answer->body + at;
    int small = from[0] & TOLD, bytes;
    if (small < 24) {
        *told = small;
        return at + 1;
    }
    if (small == 31) {
        *told = -1;
        return at + 1;
    }
    if (small > 27) return DECLINED;
    bytes = 1 << (small - 24);
    if (!HAS(1 + bytes)) return DECLINED;
    if (bytes == 8 && from[1] >= 0x80) return DECLINED;
    uint64_t number = 0;
    for (int each = 1; each <= bytes; each++) number = number << 8 | from[each];
    *told = (int64_t)number;
    return at + 1 + bytes;
}

static Py_ssize_t opened(const Answer *answer, Py_ssize_t at, int kind, int64_t *told) {
    if (!HAS(1) || (answer->body[at] & KIND) != kind) return DECLINED;
    return head(answer, at, told);
}

/* Return where the content of the byte or text string at `at` begins; *size is its length. */
static Py_ssize_t sized(const Answer *answer, Py_ssize_t at, int kind, int64_t *size) {
    at = opened(answer, at, kind, size);
    if (at < 0) return at;
    return *size < 0 || *size > answer->size - at ? DECLINED : at;
}

static Py_ssize_t text(const Answer *answer, Py_ssize_t at, int64_t *size) {
    at = sized(answer, at, TEXT, size);
    if (at < 0) return at;
    const unsigned char *from = answer->body + at, *end = from + *size;
    uint64_t eight;
    for (; end - from >= 8; from += 8) {
        memcpy(&eight, from, 8);
        if (eight & 0x8080808080808080ULL) break;
    }
    while (from < end && *from < 0x80) from++;
    if (from < end) { /* the rest is not ASCII; let Python check whether it is UTF-8 */
        PyObject *told = PyUnicode_DecodeUTF8((const char *)from, end - from, NULL);
        if (!told) {
            if (!PyErr_ExceptionMatches(PyExc_UnicodeDecodeError)) return FAILED;
            PyErr_Clear();
            return DECLINED;
        }
        Py_DECREF(told);
    }
    return at;
}

/* Return where the item that begins here ends. */
static Py_ssize_t after(const Answer *answer, Py_ssize_t at) {
    int64_t left[DEPTH] = {1}; /* items left in each open container; negative: until a break */
    int open = 1;
    while (open) {
        if (!left[open - 1]) {
            open--;
            continue;
        }
        if (!HAS(1)) return DECLINED;
        if (left[open - 1] < 0 && answer->body[at] == BREAK) {
            at++;
            open--;
            continue;
        }
        left[open - 1]--;
        int kind = answer->body[at] & KIND;
        int64_t size;
        at = head(answer, at, &size);
        if (at < 0) return at;
        if (kind == ARRAY || kind == MAP || kind == TAG) {
            if (kind == TAG && size < 0) return DECLINED;
            if (kind != TAG && size > answer->size - at) return DECLINED; /* each item takes at least one byte */
            if (open == DEPTH) return DECLINED;
            left[open++] = kind == TAG ? 1 : kind == MAP ? 2 * size : size;
        } else if (size < 0) {
            return DECLINED;
        } else if (kind == BYTES || kind == TEXT) {
            if (size > answer->size - at) return DECLINED;
            at += size;
        }
    }
    return at;
}

#define STANDS(name) (HAS((Py_ssize_t)sizeof(name) - 1) && !memcmp(answer->body + at, name, sizeof(name) - 1))

/* Return where the array of records begins. */
static Py_ssize_t begin_of(const Answer *answer) {
    int64_t left;
    Py_ssize_t at = opened(answer, 0, MAP, &left);
    if (at < 0) return at;
    while (left) {
        if (!HAS(1) || (left < 0 && answer->body[at] == BREAK)) return DECLINED;
        left--;
        if (STANDS(RECORDS)) return at + (Py_ssize_t)sizeof(RECORDS) - 1;
        at = after(answer, at);
        if (at < 0) return at;
        at = after(answer, at);
        if (at < 0) return at;
    }
    return DECLINED;
}

/* The views of a response: the location of each data, number and key, and each time. */
typedef struct {
    Column datas, numbers, keys, arrived;
    int sealed;
} Views;

static int view(Column *column, const Answer *answer, Py_ssize_t begin, int64_t size) {
    unsigned char *place = added(column, VIEW);
    if (!place) return FAILED;
    int32_t told = (int32_t)size, from = (int32_t)begin;
    memcpy(place, &told, 4);
    if (size > HELD) {
        memcpy(place + 4, answer->body + begin, 4);
        memset(place + 8, 0, 4);
        memcpy(place + 12, &from, 4);
    } else {
        memset(place + 4, 0, HELD);
        memcpy(place + 4, answer->body + begin, (size_t)size);
    }
    return 0;
}

/* Add the row that begins here, and return where it ends. Each required field must occur exactly once. */
static Py_ssize_t row(const Answer *answer, Py_ssize_t at, Views *views) {
    if (!HAS(1)) return DECLINED;
    int first = answer->body[at], seen = 0, left = first == MAP_OPEN ? 5 : first - MAP;
    if (left > 23 && first != MAP_OPEN) return DECLINED;
    int64_t size;
    at++;
    for (; left > 0; left--) {
        if (!HAS(1)) return DECLINED;
        if (first == MAP_OPEN && answer->body[at] == BREAK) break;
        Column *column = NULL;
        if (STANDS(DATA)) {
            seen += 0x1;
            at = sized(answer, at + 5, BYTES, &size);
            if (at >= 0 && size > 3 && !memcmp(answer->body + at, MAGIC, 4)) views->sealed = 1;
            column = &views->datas;
        } else if (STANDS(SEQUENCE)) {
            seen += 0x10;
            at = text(answer, at + 15, &size);
            column = &views->numbers;
        } else if (STANDS(KEY)) {
            seen += 0x100;
            at = text(answer, at + 13, &size);
            column = &views->keys;
        } else if (STANDS(ARRIVED)) {
            seen += 0x1000;
            at += 29;
            if (HAS(1) && answer->body[at] == TIME) at++;
            int64_t told;
            at = opened(answer, at, NUMBER, &told);
            if (at < 0) return at;
            if (told < 0 || told >= LATEST) return DECLINED;
            void *place = added(&views->arrived, 8);
            if (!place) return FAILED;
            memcpy(place, &told, 8);
            size = 0;
        } else if (STANDS(ENCRYPTION)) {
            at = text(answer, at + 15, &size);
        } else {
            return DECLINED;
        }
        if (at < 0) return at;
        if (column && view(column, answer, at, size) < 0) return FAILED;
        at += size;
    }
    if (seen != 0x1111) return DECLINED;
    if (first != MAP_OPEN) return at;
    return HAS(1) && answer->body[at] == BREAK ? at + 1 : DECLINED;
}

static PyObject *viewed(PyObject *module, PyObject *given) {
    Py_buffer buffer;
    if (PyObject_GetBuffer(given, &buffer, PyBUF_SIMPLE) < 0) return NULL;
    Answer made = {buffer.buf, buffer.len}, *answer = &made;
    Views views = {{0}};
    PyObject *told = NULL;
    Py_ssize_t begin = buffer.len < LIMIT ? begin_of(answer) : DECLINED, at = begin;
    int64_t left = 0;
    if (at >= 0) at = opened(answer, at, ARRAY, &left);
    while (at >= 0 && left) {
        if (!HAS(1)) at = DECLINED;
        else if (left < 0 && answer->body[at] == BREAK) break;
        else {
            left--;
            at = row(answer, at, &views);
        }
    }
    if (at >= 0 && left < 0) at++;
    if (at >= 0)
        told = Py_BuildValue(
            "y#y#y#y#Onn", views.datas.bytes ? views.datas.bytes : "", (Py_ssize_t)views.datas.size,
            views.numbers.bytes ? views.numbers.bytes : "", (Py_ssize_t)views.numbers.size,
            views.keys.bytes ? views.keys.bytes : "", (Py_ssize_t)views.keys.size,
            views.arrived.bytes ? views.arrived.bytes : "", (Py_ssize_t)views.arrived.size,
            views.sealed ? Py_True : Py_False, begin, at);
    else if (at == FAILED) {
        if (!PyErr_Occurred()) PyErr_NoMemory();
    } else
        told = Py_NewRef(Py_None);
    PyMem_Free(views.datas.bytes);
    PyMem_Free(views.numbers.bytes);
    PyMem_Free(views.keys.bytes);
    PyMem_Free(views.arrived.bytes);
    PyBuffer_Release(&buffer);
    return told;
}

/* Return the content of a view, as bytes or as str; NULL with an exception if it lies outside the response. */
static PyObject *shown(const Py_buffer *body, const char *place, int as_text) {
    int32_t size, begin;
    memcpy(&size, place, 4);
    const char *from = place + 4;
    if (size > HELD) {
        memcpy(&begin, place + 12, 4);
        if (begin < 0 || begin > body->len || size > body->len - begin) size = -1;
        else from = (const char *)body->buf + begin;
    }
    if (size < 0) {
        PyErr_SetString(PyExc_IndexError, "a view shows what is not there");
        return NULL;
    }
    return as_text ? PyUnicode_DecodeUTF8(from, size, NULL) : PyBytes_FromStringAndSize(from, size);
}

static PyObject *columns(PyObject *module, PyObject *const *given, Py_ssize_t count) {
    if (count != 5) {
        PyErr_SetString(PyExc_TypeError, "columns(body, datas, numbers, keys, arrived)");
        return NULL;
    }
    Py_buffer body, views[4];
    if (PyObject_GetBuffer(given[0], &body, PyBUF_SIMPLE) < 0) return NULL;
    int open = 0;
    PyObject *made[4] = {NULL}, *told = NULL;
    for (; open < 4; open++)
        if (PyObject_GetBuffer(given[1 + open], &views[open], PyBUF_SIMPLE) < 0) goto end;
    Py_ssize_t rows = views[3].len / 8;
    for (int each = 0; each < 3; each++)
        if (views[each].len != rows * VIEW || views[3].len != rows * 8) {
            PyErr_SetString(PyExc_ValueError, "the views are of different lengths");
            goto end;
        }
    for (int each = 0; each < 4; each++)
        if (!(made[each] = PyList_New(rows))) goto end;
    for (Py_ssize_t at = 0; at < rows; at++) {
        for (int each = 0; each < 3; each++) {
            PyObject *value = shown(&body, (const char *)views[each].buf + at * VIEW, each);
            if (!value) goto end;
            PyList_SET_ITEM(made[each], at, value);
        }
        int64_t time;
        memcpy(&time, (const char *)views[3].buf + at * 8, 8);
        /* Milliseconds if it is too late to be a time in seconds. */
        PyObject *value = PyFloat_FromDouble(time >= MILLISECONDS ? (double)time / 1000 : (double)time);
        if (!value) goto end;
        PyList_SET_ITEM(made[3], at, value);
    }
    told = PyTuple_Pack(4, made[0], made[1], made[2], made[3]);
end:
    for (int each = 0; each < 4; each++) Py_XDECREF(made[each]);
    while (open--) PyBuffer_Release(&views[open]);
    PyBuffer_Release(&body);
    return told;
}

enum { COLUMNS = 7, FIELDS = 9 };

/* An iterator that creates records on demand. */
typedef struct {
    PyObject_HEAD
    PyTypeObject *kind;
    PyObject *columns[COLUMNS], *token;
    Py_ssize_t at;
} Records;

static PyObject *next_record(Records *self) {
    for (int each = 0; each < COLUMNS; each++) /* a list may have become shorter meanwhile */
        if (!self->columns[each] || self->at >= PyList_GET_SIZE(self->columns[each])) return NULL;
    PyObject *made = self->kind->tp_alloc(self->kind, FIELDS);
    if (!made) return NULL;
    for (int each = 0; each < COLUMNS; each++)
        PyTuple_SET_ITEM(made, each, Py_NewRef(PyList_GET_ITEM(self->columns[each], self->at)));
    PyTuple_SET_ITEM(made, COLUMNS, Py_NewRef(self->token));
    PyTuple_SET_ITEM(made, COLUMNS + 1, Py_NewRef(Py_None));
    self->at++;
    return made;
}

static int visit_records(Records *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    Py_VISIT((PyObject *)self->kind);
    for (int each = 0; each < COLUMNS; each++) Py_VISIT(self->columns[each]);
    return 0;
}

static int clear_records(Records *self) {
    for (int each = 0; each < COLUMNS; each++) Py_CLEAR(self->columns[each]);
    return 0;
}

static void free_records(Records *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    clear_records(self);
    Py_XDECREF((PyObject *)self->kind);
    Py_XDECREF(self->token);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyType_Slot record_slots[] = {
    {Py_tp_iter, PyObject_SelfIter},
    {Py_tp_iternext, next_record},
    {Py_tp_traverse, visit_records},
    {Py_tp_clear, clear_records},
    {Py_tp_dealloc, free_records},
    {0, NULL},
};

static PyType_Spec record_spec = {
    .name = "leasehold.adapters.sources.kinesis.cbor.scan.Records",
    .basicsize = sizeof(Records),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = record_slots,
};

static PyObject *records(PyObject *module, PyObject *const *given, Py_ssize_t count) {
    int known = count == 1 + COLUMNS && PyType_Check(given[0]) &&
                PyType_IsSubtype((PyTypeObject *)given[0], &PyTuple_Type);
    for (Py_ssize_t each = 1; known && each < count; each++) known = PyList_Check(given[each]);
    if (!known) {
        PyErr_SetString(PyExc_TypeError, "records(kind, datas, numbers, subs, keys, hash_keys, arrived, aggregated)");
        return NULL;
    }
    PyTypeObject *type = *(PyTypeObject **)PyModule_GetState(module);
    Records *made = (Records *)type->tp_alloc(type, 0);
    if (!made) return NULL;
    made->kind = (PyTypeObject *)Py_NewRef(given[0]);
    for (int each = 0; each < COLUMNS; each++) made->columns[each] = Py_NewRef(given[1 + each]);
    made->token = PyUnicode_FromStringAndSize(NULL, 0);
    if (!made->token) Py_CLEAR(made);
    return (PyObject *)made;
}

static int begin_module(PyObject *module) {
    PyObject **type = PyModule_GetState(module);
    *type = PyType_FromModuleAndSpec(module, &record_spec, NULL);
    return *type ? 0 : -1;
}

static int visit_module(PyObject *module, visitproc visit, void *arg) {
    Py_VISIT(*(PyObject **)PyModule_GetState(module));
    return 0;
}

static int clear_module(PyObject *module) {
    Py_CLEAR(*(PyObject **)PyModule_GetState(module));
    return 0;
}

static PyMethodDef functions[] = {
    {"viewed", viewed, METH_O, NULL},
    {"columns", (PyCFunction)(void (*)(void))columns, METH_FASTCALL, NULL},
    {"records", (PyCFunction)(void (*)(void))records, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, begin_module}, {0, NULL}};

static PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT, "scan", NULL, sizeof(PyObject *), functions, module_slots, visit_module, clear_module, NULL,
};

PyMODINIT_FUNC PyInit_scan(void) { return PyModuleDef_Init(&module_def); }
