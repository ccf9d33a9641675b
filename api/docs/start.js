"use strict";

// validatorUrl: null keeps Swagger UI from asking a validator on the internet.
SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#calls",
  deepLinking: true,
  validatorUrl: null,
});
