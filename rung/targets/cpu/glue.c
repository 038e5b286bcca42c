/* Calls of generated stretches from Python, with nothing of torch but the DLPack exchange API.

   A Stretch is called with tensors, sizes and addresses in the order of its kinds, or boxed, with
   one list of them. It reads the tensors, compares their layouts with those that the generated
   `layout` states, allocates the results, runs `entry` without the GIL and gives the results as a
   tuple. Whatever it does not know (a subclass, another device, another layout) goes to `slow`, a
   Python function of the same arguments, and so does each call while a profiler runs. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <stddef.h>
#include <structmember.h>

/* --- DLPack 1.x, as far as it is needed */

typedef struct { uint8_t code, bits; uint16_t lanes; } DataType;

typedef struct {
  void *data;
  struct { int32_t kind, id; } device;
  int32_t rank;
  DataType dtype;
  int64_t *sizes, *strides;
  uint64_t offset;
} Tensor;

typedef struct {
  struct { uint32_t major, minor; } version;
  void *previous, *allocate, *managed_from_object, *object_from_managed;
  int (*tensor_from_object)(void *object, Tensor *out);
  int (*stream)(int32_t kind, int32_t id, void **out);
} Exchange;

enum { CPU = 1, LOWEST = 1 << 16 };

/* --- a stretch */

enum { SIZE = -1, ADDRESS = -2, UNUSED = -3 }; /* else a tensor: code | bits << 8 | rank << 16 */

typedef struct {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  PyObject *attributes, *owner;
  PyObject *slow, *refuse, *empty, *constants, *dtypes, *classes, *profiler, *key;
  const Exchange *torch;
  long (*entry)(char *const *addresses, const long *sizes, long *found);
  void (*layout)(const long *sizes, long *layout);
  long (*here)(void); /* whether this thread may launch; NULL: it always may */
  long base;          /* what the entry is told beside the stream */
  int kind, device;   /* where the tensors lie */
  Py_ssize_t count, given, sizes, made, ranks, results;
  int boxed;
  long *kinds, *made_ranks, *order; /* one block of memory, at `kinds` */
} Stretch;

static int known_class(const Stretch *f, PyObject *x) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(f->classes); i++)
    if ((PyObject *)Py_TYPE(x) == PyTuple_GET_ITEM(f->classes, i)) return 1;
  return 0;
}

static int read_tensor(const Stretch *f, PyObject *x, long kind, Tensor *out) {
  if (!known_class(f, x) || f->torch->tensor_from_object(x, out)) return 0;
  return out->device.kind == f->kind && out->device.id == f->device && out->dtype.lanes == 1 &&
         (out->dtype.code | (long)out->dtype.bits << 8 | (long)out->rank << 16) == kind;
}

/* Whether a tensor has these sizes, these strides where it has more than one element, and memory:
   one without it, such as a fake one or a view of what was freed, has a small address. */
static int has_layout(const Tensor *t, const long *sizes, const long *strides) {
  int differs = 0, empty = 0;
  for (int32_t i = 0; i < t->rank; i++) {
    if (t->sizes[i] != sizes[i]) return 0;
    empty |= sizes[i] == 0;
    differs |= sizes[i] > 1 && t->strides[i] != strides[i];
  }
  return empty || (!differs && (uintptr_t)t->data >= LOWEST);
}

static PyObject *tuple_of(const long *numbers, long count) {
  PyObject *made = PyTuple_New(count);
  for (long i = 0; made && i < count; i++) {
    PyObject *x = PyLong_FromLong(numbers[i]);
    if (!x) Py_CLEAR(made); else PyTuple_SET_ITEM(made, i, x);
  }
  return made;
}

static PyObject *allocate(const Stretch *f, Py_ssize_t n, const long *layout) {
  long rank = f->made_ranks[n];
  PyObject *sizes = tuple_of(layout, rank), *strides = tuple_of(layout + rank, rank), *made = NULL;
  if (sizes && strides) {
    PyObject *args[] = {sizes, strides, PyTuple_GET_ITEM(f->dtypes, n)};
    made = PyObject_Vectorcall(f->empty, args, 3, NULL);
  }
  Py_XDECREF(sizes);
  Py_XDECREF(strides);
  return made;
}

static void forget(PyObject **made, Py_ssize_t count) {
  while (count--) Py_DECREF(made[count]);
}

/* The tuple of results; NULL with an exception, or NULL without one for what `slow` must do. */
static PyObject *run(const Stretch *f, PyObject *const *given) {
  Tensor tensors[f->given + 1];
  PyObject *made[f->made + 1];
  char *addresses[f->given + f->made + 1];
  long sizes[f->sizes + 1], layout[2 * f->ranks + 1], found[2] = {0}, site, *at = layout;
  Py_ssize_t t = 0, s = 0, n = 0;
  for (Py_ssize_t i = 0; i < f->count; i++) {
    long kind = f->kinds[i];
    if (kind == SIZE) {
      sizes[s++] = PyLong_AsLong(given[i]);
    } else if (kind == ADDRESS) {
      addresses[f->given + f->made] = PyLong_AsVoidPtr(given[i]);
    } else if (kind != UNUSED) {
      if (!read_tensor(f, given[i], kind, &tensors[t])) { PyErr_Clear(); return NULL; }
      addresses[t] = (char *)tensors[t].data + tensors[t].offset;
      t++;
    }
  }
  if (PyErr_Occurred()) { PyErr_Clear(); return NULL; }
  if (f->here && !f->here()) return NULL;
  if (f->kind != CPU) {
    if (f->torch->stream(f->kind, f->device, (void **)&found[0])) return NULL;
    found[1] = f->base;
  }
  f->layout(sizes, layout);
  for (t = 0; t < f->given; t++, at += 2 * tensors[t - 1].rank)
    if (!has_layout(&tensors[t], at, at + tensors[t].rank)) return NULL;
  for (; n < f->made; at += 2 * f->made_ranks[n], n++) {
    Tensor new;
    if (!(made[n] = allocate(f, n, at))) { forget(made, n); return NULL; }
    if (f->torch->tensor_from_object(made[n], &new)) { forget(made, n + 1); return NULL; }
    addresses[f->given + n] = (char *)new.data + new.offset;
  }
  Py_BEGIN_ALLOW_THREADS
  site = f->entry(addresses, sizes, found);
  Py_END_ALLOW_THREADS
  if (site) {
    forget(made, n);
    Py_XDECREF(PyObject_CallFunction(f->refuse, "lll", site, found[0], found[1])); /* raises */
    return NULL;
  }
  PyObject *out = PyTuple_New(f->results);
  for (Py_ssize_t i = 0; out && i < f->results; i++) {
    PyObject *x = made[f->order[i]];
    Py_INCREF(x);
    PyTuple_SET_ITEM(out, i, x);
  }
  forget(made, n);
  return out;
}

static PyObject *call_boxed(const Stretch *f, PyObject *list) {
  PyObject *items = PyList_Check(list) ? PyList_AsTuple(list) : NULL, *out = NULL;
  if (items && PyTuple_GET_SIZE(f->constants))
    Py_SETREF(items, PySequence_Concat(items, f->constants));
  if (items && PyTuple_GET_SIZE(items) == f->count) {
    out = run(f, &PyTuple_GET_ITEM(items, 0));
    if (out && PyList_SetSlice(list, 0, PyList_GET_SIZE(list), NULL)) Py_CLEAR(out);
  }
  Py_XDECREF(items);
  return out;
}

static PyObject *call(PyObject *self, PyObject *const *args, size_t flags, PyObject *names) {
  const Stretch *f = (const Stretch *)self;
  Py_ssize_t count = PyVectorcall_NARGS(flags);
  PyObject *out = NULL;
  if (PyDict_GetItem(f->profiler, f->key) == Py_True)
    return PyObject_Vectorcall(f->slow, args, flags, names);
  if (!names && f->boxed && count == 1) out = call_boxed(f, args[0]);
  else if (!names && !f->boxed && count == f->count) out = run(f, args);
  if (out || PyErr_Occurred()) return out;
  return PyObject_Vectorcall(f->slow, args, flags, names);
}

/* --- the type */

static int visit_stretch(PyObject *self, visitproc visit, void *arg) {
  Stretch *f = (Stretch *)self;
  PyObject *all[] = {f->attributes, f->owner, f->slow, f->refuse, f->empty, f->constants,
                     f->dtypes, f->classes, f->profiler, f->key, (PyObject *)Py_TYPE(self)};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) Py_VISIT(all[i]);
  return 0;
}

static int clear_stretch(PyObject *self) {
  Stretch *f = (Stretch *)self;
  PyObject **all[] = {&f->attributes, &f->owner, &f->slow, &f->refuse, &f->empty, &f->constants,
                      &f->dtypes, &f->classes, &f->profiler, &f->key};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) Py_CLEAR(*all[i]);
  return 0;
}

static void free_stretch(PyObject *self) {
  PyTypeObject *type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  clear_stretch(self);
  PyMem_Free(((Stretch *)self)->kinds);
  type->tp_free(self);
  Py_DECREF(type);
}

static Py_ssize_t copy_numbers(PyObject *tuple, long *out) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); i++)
    out[i] = PyLong_AsLong(PyTuple_GET_ITEM(tuple, i));
  return PyTuple_GET_SIZE(tuple);
}

/* Stretch(exchange, entry, layout, kinds, ranks of results, dtypes of results, order, boxed,
   constants, classes, empty, slow, refuse, owner, profiler, key, kind and number of the device,
   here, base) */
static PyObject *new_stretch(PyTypeObject *type, PyObject *args, PyObject *names) {
  PyObject *exchange, *kinds, *ranks, *order;
  unsigned long long entry, layout, here;
  Stretch *f = (Stretch *)type->tp_alloc(type, 0);
  if (!f) return NULL;
  f->vectorcall = call;
  if (!PyArg_ParseTuple(args, "OKKO!O!O!O!pO!O!OOOOO!UiiKl", &exchange, &entry, &layout,
                        &PyTuple_Type, &kinds, &PyTuple_Type, &ranks, &PyTuple_Type, &f->dtypes,
                        &PyTuple_Type, &order, &f->boxed, &PyTuple_Type, &f->constants,
                        &PyTuple_Type, &f->classes, &f->empty, &f->slow, &f->refuse, &f->owner,
                        &PyDict_Type, &f->profiler, &f->key, &f->kind, &f->device, &here,
                        &f->base)) {
    f->dtypes = f->constants = f->classes = f->empty = f->slow = f->refuse = f->owner = NULL;
    f->profiler = f->key = NULL;
    Py_DECREF(f);
    return NULL;
  }
  Py_INCREF(f->dtypes); Py_INCREF(f->constants); Py_INCREF(f->classes); Py_INCREF(f->empty);
  Py_INCREF(f->slow); Py_INCREF(f->refuse); Py_INCREF(f->owner); Py_INCREF(f->profiler);
  Py_INCREF(f->key);
  f->entry = (long (*)(char *const *, const long *, long *))(uintptr_t)entry;
  f->layout = (void (*)(const long *, long *))(uintptr_t)layout;
  f->here = (long (*)(void))(uintptr_t)here;
  f->torch = PyCapsule_GetPointer(exchange, "dlpack_exchange_api");
  Py_ssize_t total = PyTuple_GET_SIZE(kinds) + PyTuple_GET_SIZE(ranks) + PyTuple_GET_SIZE(order);
  f->kinds = PyMem_Calloc(total + 1, sizeof(long));
  if (!f->torch || !f->kinds) {
    if (!PyErr_Occurred()) PyErr_NoMemory();
    Py_DECREF(f);
    return NULL;
  }
  f->made_ranks = f->kinds + PyTuple_GET_SIZE(kinds);
  f->order = f->made_ranks + PyTuple_GET_SIZE(ranks);
  f->count = copy_numbers(kinds, f->kinds);
  f->made = copy_numbers(ranks, f->made_ranks);
  f->results = copy_numbers(order, f->order);
  for (Py_ssize_t i = 0; i < f->count; i++) {
    f->sizes += f->kinds[i] == SIZE;
    f->given += f->kinds[i] >= 0;
    f->ranks += f->kinds[i] >= 0 ? f->kinds[i] >> 16 : 0;
  }
  for (Py_ssize_t i = 0; i < f->made; i++) f->ranks += f->made_ranks[i];
  if (PyErr_Occurred()) Py_CLEAR(f);
  return (PyObject *)f;
}

static PyMemberDef members[] = {
  {"__vectorcalloffset__", T_PYSSIZET, offsetof(Stretch, vectorcall), READONLY, NULL},
  {"__dictoffset__", T_PYSSIZET, offsetof(Stretch, attributes), READONLY, NULL},
  {NULL}};

static PyGetSetDef attributes[] = {
  {"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, NULL, NULL}, {NULL}};

static PyType_Slot slots[] = {
  {Py_tp_new, new_stretch}, {Py_tp_dealloc, free_stretch}, {Py_tp_traverse, visit_stretch},
  {Py_tp_clear, clear_stretch}, {Py_tp_call, PyVectorcall_Call}, {Py_tp_members, members},
  {Py_tp_getset, attributes}, {0, NULL}};

static PyType_Spec spec = {
  "rung_glue.Stretch", sizeof(Stretch), 0,
  Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL, slots};

static PyModuleDef module = {PyModuleDef_HEAD_INIT, "rung_glue", NULL, -1, NULL};

PyMODINIT_FUNC PyInit_rung_glue(void) {
  PyObject *made = PyModule_Create(&module), *type = made ? PyType_FromSpec(&spec) : NULL;
  if (!type || PyModule_AddObject(made, "Stretch", type)) {
    Py_XDECREF(type);
    Py_XDECREF(made);
    return NULL;
  }
  return made;
}
