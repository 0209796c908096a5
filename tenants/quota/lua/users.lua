-- How many end users have counters, changing nothing. (ARGV: now_us, epoch)

if is_lost() then
  return {'lost'}
end
return {'users', redis.call('HLEN', keys.users)}
