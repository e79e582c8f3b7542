// Swagger's page of the API, with the key of the chat.

const key = sessionStorage.getItem("pagewire.key");

const dark = matchMedia("(prefers-color-scheme: dark)");
const paint = () => document.documentElement.classList.toggle("dark-mode", dark.matches);
dark.addEventListener("change", paint);
paint();

window.SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#swagger-ui",
  deepLinking: true,
  validatorUrl: null,
  requestInterceptor: (request) => {
    if (key) request.headers.Authorization ??= `Bearer ${key}`;
    return request;
  },
});
