// Swagger's page of the API, with the key of the chat.

const key = sessionStorage.getItem("pagewire.key");

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
