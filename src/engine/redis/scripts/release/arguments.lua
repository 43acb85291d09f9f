-- The arguments of release.lua, and placed before it.

local n = #ARGV - 1
local to, last, keep = string.match(ARGV[1], '^(%S+) ?(%d*) ?(%d*)$')
last, keep = last == '' and '0' or last, keep ~= '' and keep or nil

