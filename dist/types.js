"use strict";
/// <reference lib="es2020" />
/// <reference lib="esnext.disposable" />
Object.defineProperty(exports, "__esModule", { value: true });
