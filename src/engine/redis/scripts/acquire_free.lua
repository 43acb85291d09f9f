-- The common case of acquire.lua, and placed before it: one name that is free and has no waiters, without metadata. The
-- functions of the rest of the script are not even defined then.

local owner, ttl, kept, metadata = ARGV[1], ARGV[2], ARGV[3], ARGV[9]
-- acquire.lua describes the keys.
local n = #KEYS / (metadata and 4 or 3)

if n == 1 and not metadata and redis.call('EXISTS', KEYS[3]) == 0 then
  -- Read before anything is written, because a read fails if the key has another type.
  local last = redis.call('GET', LAST or KEYS[2])
  if redis.call('SET', KEYS[1], owner, 'PX', ttl, 'NX') then
    local now = redis.call('TIME')
    local micros = string.format('%06d', now[2])
    local fence, least = now[1] .. micros, ARGV[8]
    if last or least then
      local known = last and tonumber(string.match(last, '^%d+')) or 0
      least = math.max(known + 1, tonumber(least or 0))
      if least > tonumber(fence) then
        fence = string.format('%.0f', least)
      end
    end
    local since = now[1] .. string.sub(micros, 1, 3)
    redis.call('SET', KEYS[2], fence .. ' ' .. owner .. ' ' .. since .. ' ' .. ARGV[4], 'PX', kept)
    if LAST then
      redis.call('SET', LAST, fence)
    end
    return tonumber(fence)
  end
end

