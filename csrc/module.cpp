// The Python module paged_prefill._C, within the limited API of Python 3.10.
#include <Python.h>

#include <stdexcept>

#include "launcher.h"
#include "messages.h"

namespace paged_prefill {
namespace {

bool hip = false;
PyObject* describe_function = nullptr;
PyObject* read_image_function = nullptr;
PyObject* report_load_function = nullptr;

// A new reference, released with its scope.
class Object {
 public:
  explicit Object(PyObject* object) : object_(object) {
    if (!object) throw_python_error();
  }
  Object(const Object&) = delete;
  ~Object() { Py_DecRef(object_); }
  PyObject* get() const { return object_; }

  // Turns the pending Python error into a C++ one with the same text.
  [[noreturn]] static void throw_python_error() {
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    std::string text = "unknown error in paged_prefill's loader";
    if (PyObject* words = value ? PyObject_Str(value) : nullptr) {
      Py_ssize_t size = 0;
      if (const char* bytes = PyUnicode_AsUTF8AndSize(words, &size)) text.assign(bytes, size);
      Py_DecRef(words);
    }
    PyErr_Clear();
    Py_DecRef(type);
    Py_DecRef(value);
    Py_DecRef(traceback);
    throw std::runtime_error(text);
  }

 private:
  PyObject* object_;
};

class GilHeld {
 public:
  GilHeld() : state_(PyGILState_Ensure()) {}
  ~GilHeld() { PyGILState_Release(state_); }

 private:
  PyGILState_STATE state_;
};

PyObject* item(PyObject* dictionary, const char* key) {
  PyObject* value = PyDict_GetItemString(dictionary, key);
  if (!value) throw std::runtime_error(std::string("an image's description lacks ") + key);
  return value;
}

std::string text(PyObject* value) {
  Py_ssize_t size = 0;
  const char* bytes = PyUnicode_AsUTF8AndSize(value, &size);
  if (!bytes) Object::throw_python_error();
  return std::string(bytes, size);
}

int number(PyObject* value, int if_none = 0) {
  if (value == Py_None) return if_none;
  long result = PyLong_AsLong(value);
  if (result == -1 && PyErr_Occurred()) Object::throw_python_error();
  return static_cast<int>(result);
}

std::unique_ptr<Variant> read_variant(PyObject* entry) {
  auto variant = std::make_unique<Variant>();
  variant->image.id = text(item(entry, "id"));
  variant->image.symbol = text(item(entry, "symbol"));
  variant->image.shared = number(item(entry, "shared"));
  variant->image.threads = number(item(entry, "threads"));
  variant->dtype = text(item(entry, "dtype"));
  variant->head_tile = number(item(entry, "head_tile"));
  variant->head_dim = number(item(entry, "head_dim"));
  variant->min_heads = number(item(entry, "min_heads"), 0);
  variant->max_heads = number(item(entry, "max_heads"), INT32_MAX);
  variant->aligned = item(entry, "aligned") == Py_True;
  variant->persistent = text(item(entry, "grid")) == "persistent";
  PyObject* arguments = item(entry, "arguments");
  for (Py_ssize_t i = 0; i < PySequence_Size(arguments); i++) {
    Object argument(PySequence_GetItem(arguments, i));
    Object name(PySequence_GetItem(argument.get(), 0));
    Object type(PySequence_GetItem(argument.get(), 1));
    variant->add_argument(text(name.get()), text(type.get()));
  }
  return variant;
}

// Runs a method's body, with C++ exceptions as RuntimeError.
template <typename Body>
PyObject* guarded(Body body) {
  try {
    return body();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

PyObject* none() {
  Py_IncRef(Py_None);
  return Py_None;
}

PyObject* register_loader(PyObject*, PyObject* arguments) {
  const char* vendor;
  PyObject* functions[3];
  if (!PyArg_ParseTuple(arguments, "sOOO:register_loader", &vendor, &functions[0], &functions[1], &functions[2])) {
    return nullptr;
  }
  hip = std::string(vendor) == "hip";
  PyObject** registered[] = {&describe_function, &read_image_function, &report_load_function};
  for (int i = 0; i < 3; i++) {
    Py_IncRef(functions[i]);
    Py_DecRef(*registered[i]);
    *registered[i] = functions[i];
  }
  return none();
}

template <void (*function)(int)>
PyObject* call_with_ordinal(PyObject*, PyObject* argument) {
  return guarded([&] {
    function(number(argument));
    return none();
  });
}

PyObject* loaded_images(PyObject*, PyObject* argument) {
  return guarded([&] {
    Object ids(PyList_New(0));
    for (const std::string& id : loaded(number(argument))) {
      Object entry(PyUnicode_FromStringAndSize(id.data(), id.size()));
      if (PyList_Append(ids.get(), entry.get())) Object::throw_python_error();
    }
    Py_IncRef(ids.get());
    return ids.get();
  });
}

PyObject* last_image(PyObject*, PyObject* argument) {
  return guarded([&] {
    std::string id = last_launch(number(argument));
    return id.empty() ? none() : PyUnicode_FromStringAndSize(id.data(), id.size());
  });
}

PyObject* facts(PyObject*, PyObject* argument) {
  return guarded([&] {
    DeviceFacts found = device_facts(number(argument));
    return Py_BuildValue("(ssisi)", hip ? "hip" : "cuda", found.architecture.c_str(), found.driver_version,
                         found.name.c_str(), found.shared_limit);
  });
}

PyObject* guard_texts(PyObject*, PyObject*) {
  return guarded([] {
    Object texts(PyDict_New());
    for (const MessageText& message : message_texts) {
      Object entry(Py_BuildValue("(ss)", message.text, message.hint));
      if (PyDict_SetItemString(texts.get(), message.name, entry.get())) Object::throw_python_error();
    }
    Py_IncRef(texts.get());
    return texts.get();
  });
}

PyMethodDef methods[] = {
    {"register_loader", register_loader, METH_VARARGS,
     "register_loader(vendor, describe, read_image, report_load): how a device's images are found, asked at its first "
     "call, and who is told how long each took to load."},
    {"device_facts", facts, METH_O,
     "device_facts(ordinal): (vendor, architecture, driver_version, name, shared_limit) as the driver says them."},
    {"preload", call_with_ordinal<preload>, METH_O, "preload(ordinal): loads every image of a device now."},
    {"reset", call_with_ordinal<reset>, METH_O, "reset(ordinal): describes a device again at its next call."},
    {"loaded", loaded_images, METH_O, "loaded(ordinal): ids of the loaded images."},
    {"last_launch", last_image, METH_O, "last_launch(ordinal): id of the image launched last, or None."},
    {"guard_texts", guard_texts, METH_NOARGS, "guard_texts(): {name: (text, hint)}, with {placeholders}."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT,
                          "paged_prefill._C",
                          "Guards, loader and launcher.",
                          -1,
                          methods,
                          nullptr,
                          nullptr,
                          nullptr,
                          nullptr};

}  // namespace

namespace python {

bool uses_hip() { return hip; }

std::vector<std::unique_ptr<Variant>> describe(int ordinal, const DeviceFacts& facts) {
  GilHeld gil;
  if (!describe_function) fail(Message::no_loader);
  Object entries(PyObject_CallFunction(describe_function, "issisi", ordinal, hip ? "hip" : "cuda",
                                       facts.architecture.c_str(), facts.driver_version, facts.name.c_str(),
                                       facts.shared_limit));
  std::vector<std::unique_ptr<Variant>> variants;
  for (Py_ssize_t i = 0; i < PySequence_Size(entries.get()); i++) {
    Object entry(PySequence_GetItem(entries.get(), i));
    variants.push_back(read_variant(entry.get()));
  }
  return variants;
}

std::string read_image(int ordinal, const std::string& id) {
  GilHeld gil;
  Object image(PyObject_CallFunction(read_image_function, "is", ordinal, id.c_str()));
  char* bytes = nullptr;
  Py_ssize_t size = 0;
  if (PyBytes_AsStringAndSize(image.get(), &bytes, &size)) Object::throw_python_error();
  return std::string(bytes, size);
}

void report_load(int ordinal, const std::string& id, double milliseconds) {
  GilHeld gil;
  Object none(PyObject_CallFunction(report_load_function, "isd", ordinal, id.c_str(), milliseconds));
}

GilReleased::GilReleased() : held_(PyGILState_Ensure()), state_(PyEval_SaveThread()) {}

GilReleased::~GilReleased() {
  PyEval_RestoreThread(static_cast<PyThreadState*>(state_));
  PyGILState_Release(static_cast<PyGILState_STATE>(held_));
}

}  // namespace python
}  // namespace paged_prefill

PyMODINIT_FUNC PyInit__C() { return PyModule_Create(&paged_prefill::definition); }
