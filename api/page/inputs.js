// Input images: the chosen files as data URLs, and the fields that count only with an image.

const form = document.getElementById("form");
const FILES = ["image", "mask_image"];
const SIZES = ["width", "height"];

// Calls onChange when an image was chosen or removed.
export function startInputs(onChange) {
  for (const name of FILES) {
    form.elements[name].addEventListener("change", () => {
      showFields();
      if (name === "image") onChange();
    });
  }
  showFields();
}

export function hasImage() {
  const field = form.elements.image;
  return !field.closest("[hidden]") && field.files.length > 0;
}

// Fields that the model supports are shown; those about an image only when there is one.
export function showFields(supported) {
  for (const label of form.querySelectorAll("[data-field]")) {
    if (supported) label.dataset.supported = Boolean(supported[label.dataset.field]);
    label.hidden = label.dataset.supported !== "true";
  }
  for (const label of form.querySelectorAll("[data-with-image]")) {
    label.hidden ||= !hasImage();
  }
}

// An image brings its own shape, unless another one is written.
export function followImage(defaults) {
  for (const name of SIZES) {
    form.elements[name].value = hasImage() ? "" : defaults[name];
    form.elements[name].placeholder = hasImage() ? "from the image" : "";
  }
}

export async function readInputs() {
  const given = {};
  for (const name of FILES) {
    const field = form.elements[name];
    if (field.closest("[hidden]") || !field.files.length) continue;
    const urls = await Promise.all(Array.from(field.files, dataUrl));
    given[name] = urls.length === 1 ? urls[0] : urls;
  }
  return given;
}

// Puts the inputs of an earlier request back into the form.
export async function reuseInputs(parameters) {
  const paths = { image: parameters.image, mask_image: parameters.mask_image ? [parameters.mask_image] : [] };
  for (const name of FILES) {
    const chosen = new DataTransfer();
    for (const path of paths[name]) {
      const response = await fetch(path.slice(1)).catch(() => null);
      if (!response?.ok) continue;
      const blob = await response.blob();
      chosen.items.add(new File([blob], `input.${blob.type.split("/").pop()}`, { type: blob.type }));
    }
    form.elements[name].files = chosen.files;
  }
  showFields();
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => reject(reader.error));
    reader.readAsDataURL(file);
  });
}
