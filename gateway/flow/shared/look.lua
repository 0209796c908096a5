-- What waits in a pool, tenant by tenant, for forecasts. Reads only; any gateway may call it.
-- KEYS: 1 tenants, 2 meta, 3-8 the tenants that wait in each place. ARGV: the most tenants of a place.

local waits = {}
for place = 1, 6 do
  for _, id in ipairs(redis.call('ZRANGE', KEYS[2 + place], 0, tonumber(ARGV[1]) - 1)) do
    local packed = redis.call('HGET', KEYS[1], id)
    if packed then
      local tenant = cmsgpack.unpack(packed)
      waits[#waits + 1] = {
        place, id, tenant.weight, tenant.counter + tenant.lift[place], tenant.count[place], tenant.input[place],
        tenant.output[place],
      }
    end
  end
end
return cmsgpack.pack({tonumber(redis.call('HGET', KEYS[2], 'falls') or '0'), waits})
